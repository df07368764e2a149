"""What the values of records look like: schemas, their versions, and what may follow what."""
