"""Import and export of records in other formats."""
