"""What aiodist_verl uses of verl, which is no part of the development environment."""
