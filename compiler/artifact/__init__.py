"""The artifact on disk: manifest, writer, reader, checksums."""
