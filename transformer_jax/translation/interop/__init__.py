"""Other libraries' formats of a translation model."""
