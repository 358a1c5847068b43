"""Users' records: any object that holds them becomes a validated source, and a source gives batches."""
