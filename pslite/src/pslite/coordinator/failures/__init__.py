"""What a coordinator does about members that are gone, and about jobs that make no progress."""
