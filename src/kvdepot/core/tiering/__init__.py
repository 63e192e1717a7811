"""What tiers are asked, what is loaded from them, saved and forgotten in them. Part of the deciding thread's code."""
