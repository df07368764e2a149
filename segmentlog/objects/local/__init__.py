"""The local store as the shipper sees it: snapshots of partitions, and which uploaded objects still match them."""
