"""What tests know of results, where their types leave it open."""

from fairwind.runs.schema import Config, FederatedConfig, FederationFacts, FederationName


def known(value: object) -> float:
    """A number that is there."""
    assert isinstance(value, int | float)
    return value


def config_of(config: Config | FederatedConfig) -> Config:
    """What a simulation was started with."""
    assert "algorithms" in config
    return config


def facts_of(federation: FederationFacts | FederationName) -> FederationFacts:
    """A federation of which all is known."""
    assert "clients" in federation
    return federation
