"""Spark jobs over whole topics: aggregate, archive, restore, export, import, query, table and verify."""
