"""S3 and services that speak it."""
