"""Objects in Amazon S3, Google Cloud Storage and Azure Blob Storage."""
