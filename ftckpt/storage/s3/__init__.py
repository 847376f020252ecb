"""S3 and compatible services."""
