"""A client, in the engine's process."""

from kvdepot.client.contract import MessageQueueClient
from kvdepot.client.socket import Client, MessagingFuture

__all__ = ["Client", "MessageQueueClient", "MessagingFuture"]
