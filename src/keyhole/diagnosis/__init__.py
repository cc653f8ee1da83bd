"""What differs between a reference and a served model: the catalogue of faults and its search."""
