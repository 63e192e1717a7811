"""What both ends agree on: messages, keys, layouts, the status, how they find and prove each other."""
