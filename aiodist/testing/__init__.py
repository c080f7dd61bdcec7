"""For tests of code that uses aiodist or extends it. Nothing in the library imports it."""
