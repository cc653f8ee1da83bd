"""The papers' own algorithms, one file per theorem; what is beyond them is told in each."""
