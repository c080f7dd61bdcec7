"""What aiodist_torch uses of torchft, which is no part of the development environment."""
