"""The method: prefill, draft, verify, commit on paged caches and device state."""
