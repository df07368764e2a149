"""Access to an object store: S3, Google Cloud Storage, Azure, or a folder. Independent of logs and segments."""
