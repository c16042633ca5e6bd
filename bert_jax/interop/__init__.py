"""Other programs' formats: each module reads or writes one of them and checks what it wrote."""
