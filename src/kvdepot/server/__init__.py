"""The loop of `kvdepot serve`."""
