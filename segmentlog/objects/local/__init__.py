"""The local store as the shipper sees it: partition snapshots, and which uploaded objects still match them."""
