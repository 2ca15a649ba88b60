"""`polydraft serve`: the command and its options."""

import typer

from polydraft.cli.arguments.options import (
    DeviceOption,
    DraftOption,
    DtypeOption,
    TargetOption,
    TreeOption,
)
from polydraft.cli.arguments.serving import (
    AllowedHostOption,
    BodyOption,
    ChunkOption,
    ConnectionsOption,
    DeadlineOption,
    DraftMetricsOption,
    GraceOption,
    HostOption,
    KeptOption,
    KeyOption,
    LengthOption,
    LogPromptsOption,
    ModelNameOption,
    OriginOption,
    PortOption,
    PromptLimitOption,
    QueueOption,
    ServeDrafterOption,
    ServePlanOption,
    ServeVerifierOption,
    SlotsOption,
    StallOption,
    ThreadsOption,
    VllmOption,
)
from polydraft.cli.process import importing


def serve(
    target: TargetOption = None,
    draft: DraftOption = None,
    drafter: ServeDrafterOption = None,
    verifier: ServeVerifierOption = None,
    tree: TreeOption = None,
    plan: ServePlanOption = None,
    host: HostOption = "127.0.0.1",
    port: PortOption = 8000,
    api_key: KeyOption = None,
    allowed_host: AllowedHostOption = None,
    cors_origin: OriginOption = None,
    model_name: ModelNameOption = None,
    dtype: DtypeOption = "auto",
    device: DeviceOption = "auto",
    threads: ThreadsOption = None,
    batch_size: SlotsOption = 8,
    max_queue: QueueOption = 128,
    max_connections: ConnectionsOption = 1000,
    max_length: LengthOption = None,
    max_prompt_tokens: PromptLimitOption = None,
    max_body: BodyOption = 4 << 20,
    chunk: ChunkOption = 256,
    kept_texts: KeptOption = 8,
    stall: StallOption = 120.0,
    deadline: DeadlineOption = 600.0,
    grace: GraceOption = 30.0,
    log_prompts: LogPromptsOption = False,
    vllm_metrics: VllmOption = False,
    per_request_spec_decode_metrics: DraftMetricsOption = "summary",
) -> None:
    """Serve a model to OpenAI's clients, with a page at / and metrics at /metrics."""
    with importing():
        from polydraft.cli.serve.running import run_serve, settings_class

    settings = settings_class()(
        target=target,
        draft=draft,
        drafter=drafter,
        verifier=None if verifier == "auto" else verifier,
        tree=tree,
        plan=plan,
        dtype=dtype,
        device=device,
        model_name=model_name,
        batch_size=batch_size,
        max_queue=max_queue,
        max_length=max_length,
        max_prompt_tokens=max_prompt_tokens,
        max_body=max_body,
        chunk=chunk,
        stall=stall,
        deadline=deadline,
        grace=grace,
        keys=tuple(api_key or ()),
        hosts=tuple(allowed_host or ()),
        origins=tuple(cors_origin or ()),
        prompts_logged=log_prompts,
        vllm_metrics=vllm_metrics,
        draft_metrics=per_request_spec_decode_metrics,
        threads=threads,
        kept_texts=kept_texts,
    )
    raise typer.Exit(run_serve(settings, host, port, max_connections))
