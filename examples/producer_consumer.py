"""Ten lines: producers and a consumer share a channel. Run `python examples/producer_consumer.py`."""

from roost import Channel, Cluster, NodePlacementStrategy, Worker
from roost.testing import local_cluster


class Producer(Worker):
    """A process that puts its results into the channel."""

    def produce(self, squares: Channel, count: int) -> None:
        squares.put_many(number**2 for number in range(self.rank, count, self.world_size))


class Consumer(Worker):
    """A process that takes them out as they come, until the channel is closed."""

    def consume(self, squares: Channel) -> int:
        return sum(squares)


if __name__ == "__main__":
    with local_cluster("2x2"), Cluster(num_nodes=2) as cluster, Channel.create("squares", maxsize=100) as squares:
        producers = Producer.create_group().launch(cluster, name="producer")
        consumer = Consumer.create_group().launch(cluster, NodePlacementStrategy([1]), name="consumer")
        total = consumer.consume(squares)
        producers.produce(squares, 1000).wait()
        squares.close()
        print("the sum of the squares of the numbers below 1000 is", *total.wait())
