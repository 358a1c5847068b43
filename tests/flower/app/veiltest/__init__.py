"""An app for tests: small and in float64, with clients that misbehave on demand."""
