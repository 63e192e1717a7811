"""A client, in the engine's process."""

from kvdepot.client.socket import MessageQueueClient, MessagingFuture

__all__ = ["MessageQueueClient", "MessagingFuture"]
