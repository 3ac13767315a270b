"""What is measured: one file a case, all of one shape."""
