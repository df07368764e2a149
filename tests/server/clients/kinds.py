"""Which clients there are."""

from __future__ import annotations

import importlib

from server.clients.driver import Driver

KINDS = {
    "confluent-kafka": ("confluent_driver", "ConfluentDriver"),
    "aiokafka": ("aiokafka_driver", "AiokafkaDriver"),
    "kafka-python": ("kafka_python_driver", "KafkaPythonDriver"),
    "kcat": ("kcat_driver", "KcatDriver"),
    "kafkajs": ("kafkajs_driver", "KafkajsDriver"),
    "java": ("java_driver", "JavaDriver"),
}


def driver_class(kind: str) -> type[Driver]:
    """Return the driver class of a client. It is imported only now, because it imports the client."""
    module, name = KINDS[kind]
    found: type[Driver] = getattr(importlib.import_module(f"server.clients.{module}"), name)
    return found
