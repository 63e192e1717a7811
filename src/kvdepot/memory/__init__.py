"""Bytes in /dev/shm, their records, where each goes, and the threads that copy. Decides nothing."""
