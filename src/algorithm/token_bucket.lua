-- The twin of token_bucket.rs: it counts as the meter does.
return meter()
