"""Made-up metrics of a step, for tests of what is logged."""

from llmtrain.train.metrics import StepMetrics, Window


def metrics(step, loss=2.0, grad_norm=1.0):
    window = Window(steps=10, seconds=5.0, tokens=10240, data_wait_s=0.5)
    return StepMetrics(step, loss, grad_norm, 1e-3, step * 1024, step * 8, window, None)
