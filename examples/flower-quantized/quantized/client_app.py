"""A Flower ClientApp; two lines are added for fedshift."""

from flwr.app import ArrayRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp

from fedshift.flower import QuantizeMod  # <-- 1
from quantized.task import new_model, train, train_data

app = ClientApp(mods=[QuantizeMod("lean")])  # <-- 2: first of the mods; a node's own `uplink` takes precedence


@app.train()
def fit(message: Message, context: Context) -> Message:
    model = new_model()
    model.load_state_dict(message.content["arrays"].to_torch_state_dict())
    batches = train_data(context.node_config["partition-id"], context.node_config["num-partitions"])
    loss = train(model, batches, context.run_config["local-epochs"], context.run_config["lr"])
    metrics = {"train_loss": loss, "num-examples": len(batches.dataset)}
    content = {"arrays": ArrayRecord(model.state_dict()), "metrics": MetricRecord(metrics)}
    return Message(RecordDict(content), reply_to=message)
