"""What the deciding thread decides. Pure: no I/O, and no clock but what it is told."""
