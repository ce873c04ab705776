"""What `gpu.py` checks: sections by name. Importing this module registers them."""

import dataclasses
import functools
import importlib
import os
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from gpu_findings import Findings, Skipped, require, section, timed

import specsampling
from specsampling import CacheError, Label, PromptLookup, Proposal, Purpose, Sampling, UniformRandomness

__all__: list[str] = []

BACKENDS = ("torch", "jax", "onnxruntime")

# Logits may differ from those in float64 by this part of their standard deviation.
DELTAS = {"float64": 1e-5, "float32": 1e-3, "bfloat16": 0.15, "float16": 0.03}

SIZES = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2}
SIZES |= {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 256}
GPT2 = {"vocab_size": 64, "n_embd": 32, "n_layer": 2, "n_head": 2, "n_positions": 256}
GEMMA2: dict[str, Any] = {
    "head_dim": 8,
    "query_pre_attn_scalar": 8,
    "attn_logit_softcapping": 2.0,
    "final_logit_softcapping": 5.0,
}
GEMMA2 |= {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 5}
MAMBA2 = {"vocab_size": 64, "hidden_size": 32, "num_hidden_layers": 2, "num_heads": 8, "head_dim": 8, "state_size": 8}
MAMBA2 |= {"n_groups": 1, "expand": 2, "conv_kernel": 4, "chunk_size": 8}
NO_IDS = {"pad_token_id": None, "bos_token_id": None, "eos_token_id": None}
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "Llama": ("Llama", SIZES),
    "Mistral, window 5": ("Mistral", {**SIZES, "sliding_window": 5}),
    "Gemma 2": ("Gemma2", {**SIZES, **GEMMA2}),
    "GPT-2": ("GPT2", {**GPT2, **NO_IDS}),
    "Mixtral": ("Mixtral", {**SIZES, "num_local_experts": 4, "num_experts_per_tok": 2}),
    "Mamba 2": ("Mamba2", {**MAMBA2, **NO_IDS}),
}
HEADS = {"GPT2": "GPT2LMHeadModel"}


def backend(name: str) -> Any:
    """Return a backend's package, or skip."""
    try:
        return importlib.import_module(f"specsampling_{name}")
    except ImportError as error:
        raise Skipped(f"the {name} backend cannot be imported: {error}") from error


def load(name: str, checkpoint: Any, findings: Findings, dtype: str = "float32", device: str | None = None) -> Any:
    """Load a checkpoint with a backend, on the section's device unless another is named; or skip."""
    package = backend(name)
    if name == "jax":
        jax = importlib.import_module("jax")
        if findings.is_accelerator and jax.default_backend() != "gpu":
            raise Skipped(f"JAX {jax.__version__} sees no GPU, only {jax.default_backend()}")
    if name == "onnxruntime" and findings.is_accelerator:
        providers = importlib.import_module("onnxruntime").get_available_providers()
        if "CUDAExecutionProvider" not in providers:
            raise Skipped(f"this build of ONNX Runtime has only {', '.join(providers)}")
    return package.load(checkpoint, dtype=dtype, device=device or findings.device)


@dataclasses.dataclass(frozen=True)
class _Loader:
    """Loads a checkpoint of the suite's, in processes of the suite's too."""

    name: str
    device: str

    def __call__(self, checkpoint: Path, dtype: str) -> Any:
        return backend(self.name).load(checkpoint, dtype=dtype, device=self.device)


def suite(name: str, tier: str, findings: Findings, checks: tuple[str, ...] = (), dtypes: tuple[str, ...] = ()) -> None:
    """Run the conformance suite against a backend."""
    from specsampling_conformance import Capabilities, check_backend

    with findings.check(f"suite, {tier}, {', '.join(checks or ('all checks',))}") as values:
        declared = getattr(load(name, specsampling.bundled("draft"), findings), "capabilities", Capabilities())
        names = {field: getattr(declared, field) for field in declared.__dataclass_fields__}
        installed = {status.name for status in specsampling.available_backends()}
        report = check_backend(
            _Loader(name, findings.device),
            Capabilities(**{**names, "dtypes": dtypes or declared.dtypes}),
            tier=tier,
            checks=checks,
            backend=name if name in installed else None,
            device=findings.device,
            time_limit=120,
            # XLA compiles for minutes, on one core.
            jobs=max(1, min(6, (os.cpu_count() or 1) // 2)) if name == "jax" else 1,
        )
        values |= {"level": report.level, "seed": report.seed, "failures": report.failures}
        values["seconds"] = {cost.tier: round(cost.seconds, 2) for cost in report.costs}
        values["report"] = [check for check in report.to_json()["checks"] if check["status"] != "not-run"]
        if not report.passed:
            raise AssertionError(str(report))


# XLA compiles every round anew for each dtype, which takes most of the time.
_LAW_DTYPES = {"jax": ("float32",)}

for _name in BACKENDS:

    @section(f"{_name}: contract", limit=120)
    def _contract(findings: Findings, name: str = _name) -> None:
        suite(name, "contract", findings)

    @section(f"{_name}: exact law", limit=200)
    def _exact(findings: Findings, name: str = _name) -> None:
        suite(name, "pr", findings, ("T1.*",), _LAW_DTYPES.get(name, ()))

    @section(f"{_name}: sampled law and whole system", limit=150)
    def _sampled(findings: Findings, name: str = _name) -> None:
        suite(name, "pr", findings, ("T3.*",), _LAW_DTYPES.get(name, ()))
        suite(name, "pr", findings, ("T2.*",), ("float32",))


def random_module(family: str, seed: int = 0, **changes: Any) -> Any:
    """Return a random module of transformers in float64 on the host."""
    backend("torch")
    import torch
    import transformers

    name, options = FAMILIES[family]
    config = getattr(transformers, f"{name}Config")(**{**options, **changes})
    config._experts_implementation = "eager"  # the fused kernels know no float64
    torch.manual_seed(seed)
    module = getattr(transformers, HEADS.get(name, f"{name}ForCausalLM"))(config)
    with torch.no_grad():
        for parameter in module.parameters():  # as they begin, laws are nearly flat and errors do not show
            parameter.add_(torch.randn(parameter.shape) * 0.2)
    return module.double().eval()


def texts(target: Any, draft: Any, **options: Any) -> Any:
    """Generate from prompts of several lengths."""
    prompts = [[1, 2, 3, 4, 5, 6, 7], [8], [9, 10, 9, 10, 9]]
    return specsampling.generate(target, draft, prompts, max_new_tokens=24, seed=7, **options)


@section("torch: random models of several families", limit=120)
def families(findings: Findings) -> None:
    """Compare logits and tokens of the device with those of the host."""
    for family in FAMILIES:
        with findings.check(f"{family}: tokens of the host, float64") as values:
            from specsampling_torch import TorchModel

            host = TorchModel(random_module(family)), TorchModel(random_module(family, 1))
            there = tuple(TorchModel(random_module(family, seed).to(findings.device)) for seed in (0, 1))
            for sampling in (Sampling(), Sampling(temperature=0.0), Sampling(temperature=0.8, top_p=0.9, top_k=20)):
                expected, result = (texts(*pair, sampling=sampling) for pair in (host, there))
                require(result.tokens == expected.tokens, (sampling, result.tokens, expected.tokens))
            values["accepted per call"] = expected.stats.tokens_per_target_call
            require(texts(there[0], PromptLookup()).tokens == texts(host[0], PromptLookup()).tokens)
        for dtype, allowed in DELTAS.items():
            with findings.check(f"{family}: blocks and steps, {dtype}") as values:
                import torch

                from specsampling_torch import TorchModel

                reference = TorchModel(random_module(family))
                model = TorchModel(random_module(family).to(findings.device, getattr(torch, dtype)))
                block = np.random.default_rng(3).integers(64, size=(3, 12))
                expected, _ = reference.score(reference.init_cache(3, 16), block)
                whole, cache = model.score(model.init_cache(3, 16), block)
                cache = model.rollback(cache, np.array([5, 5, 5]))
                steps = []
                for column in range(5, 12):
                    logits, cache = model.score(cache, block[:, column : column + 1])
                    steps.append(logits)
                spread = float(expected.std())
                values["block - step"] = float((whole[:, 5:] - torch.cat(steps, 1)).abs().max()) / spread
                values["block - float64"] = float((whole.cpu().double() - expected).abs().max()) / spread
                require(max(values.values()) <= allowed, values)


@section("torch: mixed devices, dtypes and frameworks", limit=150)
def mixed(findings: Findings) -> None:
    """Put draft and target in different places: the text stays the same."""
    loaded = functools.partial(load, findings=findings, dtype="float64")
    target, draft = specsampling.bundled("target"), specsampling.bundled("draft")
    expected = texts(specsampling.load_model("numpy", target, dtype="float64"), None).tokens
    pairs: dict[str, Callable[[], tuple[Any, Any]]] = {
        "both on the device": lambda: (loaded("torch", target), loaded("torch", draft)),
        "draft on the host": lambda: (loaded("torch", target), loaded("torch", draft, device="cpu")),
        "target on the host": lambda: (loaded("torch", target, device="cpu"), loaded("torch", draft)),
        "draft in NumPy": lambda: (loaded("torch", target), backend("numpy").load(draft, dtype="float64")),
        "target in NumPy": lambda: (backend("numpy").load(target, dtype="float64"), loaded("torch", draft)),
        "draft in JAX": lambda: (loaded("torch", target), loaded("jax", draft)),
        "target in JAX": lambda: (loaded("jax", target), loaded("torch", draft)),
        "draft in ONNX Runtime": lambda: (loaded("torch", target), loaded("onnxruntime", draft, dtype="float32")),
        "draft in bfloat16": lambda: (loaded("torch", target), loaded("torch", draft, dtype="bfloat16")),
    }
    for name, make in pairs.items():
        with findings.check(name) as values:
            models = make()
            greedy = Sampling(temperature=0.0)
            require(texts(*models, sampling=greedy).tokens == texts(models[0], None, sampling=greedy).tokens)
            result = texts(*models)
            values |= {
                "acceptance": result.stats.acceptance_rate,
                "as in NumPy": texts(models[0], None).tokens == expected,
            }
            require(values["as in NumPy"])
            require(result.stats.acceptance_rate > 0.3)
    with findings.check("a model split by device_map") as values:
        try:
            importlib.import_module("accelerate")
        except ImportError as error:
            raise Skipped("accelerate is not installed") from error
        with tempfile.TemporaryDirectory() as folder:
            random_module("Llama").save_pretrained(folder)
            parts = dict.fromkeys(["model.embed_tokens", "model.layers.0", "model.rotary_emb"], findings.device)
            parts |= dict.fromkeys(["model.layers.1", "model.norm", "lm_head"], "cpu")
            split = backend("torch").load(folder, dtype="float64", device_map=parts)
            whole = backend("torch").load(folder, dtype="float64", device=findings.device)
            values["devices"] = sorted({str(layer.keys.device) for layer in split.init_cache(1, 1).store.layers})
            require(texts(split, whole).tokens == texts(whole, split).tokens)


SETTINGS = {
    "plain": Sampling(),
    "top-k and top-p": Sampling(temperature=0.7, top_k=50, top_p=0.9),
    "top-p": Sampling(top_p=0.995),
    "min-p": Sampling(min_p=0.02),
    "per row": Sampling(temperature=[0.0, 1.0, 0.5, 1.3], top_k=[None, 40, None, 3]),
}


@section("torch: draws and selection over large vocabularies", limit=120)
def large_vocabulary(findings: Findings) -> None:
    """Compare laws, draws and verdicts on the device with those on the host."""
    for vocab_size in (128_256, 250_000, 262_144):
        rng = np.random.default_rng(vocab_size)
        logits = np.sort(rng.normal(size=(4, 5, vocab_size)) * 3)[..., ::-1].astype(np.float32)
        for name, sampling in SETTINGS.items():
            with findings.check(f"V = {vocab_size}, {name}: laws") as values:
                backend("torch")
                import torch

                there = torch.tensor(logits.copy(), device=findings.device)
                expected = specsampling.to_probs(logits.astype(np.float64), sampling)
                probs = specsampling.to_probs(there, sampling).cpu().numpy()
                values["total variation"] = float(np.abs(probs - expected).sum(-1).max() / 2)
                values["ms"] = timed(functools.partial(specsampling.to_probs, there, sampling), findings)
                require(values["total variation"] < 2e-5, values)
        for dtype, allowed in (("float64", 0), ("float32", 8)):
            with findings.check(f"V = {vocab_size}, {dtype}: draws and verdicts of the same uniforms") as values:
                backend("torch")
                import torch

                laws = specsampling.to_probs(logits.astype(dtype), Sampling(temperature=1.5, top_p=0.99))
                there = torch.tensor(laws, device=findings.device)
                differ, verdicts, banned = 0, 0, 0
                for _ in range(32):
                    uniforms = rng.uniform(1e-9, 1 - 1e-9, size=(4, 9, 3))
                    ours, theirs = UniformRandomness(uniforms, 4), UniformRandomness(uniforms, 4)
                    got, drawn = [], []
                    for slot in range(4):
                        label = Label(Purpose.DRAFT, slot)
                        drawn.append(ours.categorical(laws[:, slot], label))
                        got.append(theirs.categorical(there[:, slot], label).cpu().numpy())
                    differ += int((np.array(got) != np.array(drawn)).sum())
                    banned += int((laws[np.arange(4)[:, None], np.arange(4), np.stack(got, 1)] == 0).sum())
                    # The draft's law is the target's of one slot later: some are accepted and some are not.
                    tokens, counts = np.stack(drawn, 1), np.full(4, 4)
                    host = specsampling.verify(Proposal(tokens, counts, laws[:, :4]), laws[:, ::-1], ours)
                    placed = [torch.tensor(x, device=findings.device) for x in (tokens, counts)]
                    proposal = Proposal(placed[0], placed[1], there[:, :4])
                    verdict = specsampling.verify(proposal, there.flip(1), theirs)
                    verdicts += sum(int((np.asarray(a.cpu()) != b).sum()) for a, b in zip(verdict, host, strict=True))
                values |= {
                    "draws": 512,
                    "draws that differ": differ,
                    "verdicts that differ": verdicts,
                    "banned": banned,
                }
                require(banned == 0, values)
                require(max(differ, verdicts) <= allowed, values)


@section("torch: memory", limit=60)
def memory(findings: Findings) -> None:
    """Ask for what does not fit: it is refused with how much it needs, and nothing is lost by it."""
    with findings.check("a cache that does not fit") as values:
        module = random_module("Llama").to(findings.device)
        model = backend("torch").TorchModel(module)
        try:
            model.init_cache(10**6, 10**8)
        except CacheError as error:
            values["message"] = str(error)
        require("MiB" in values.get("message", ""), values)
        require(len(texts(model, model).tokens[0]) == 24)


def _compiled(folder: str, findings: Findings, dtype: str) -> Any:
    """Return a compiled model, or skip where the backend has no such option."""
    try:
        return backend("torch").load(folder, dtype=dtype, device=findings.device, compile=True)
    except TypeError as error:
        if "compile" not in str(error):
            raise
        raise Skipped(f"the backend has no `compile`: {error}") from error


@section("torch: compiled", limit=180)
def compiled(findings: Findings) -> None:
    """Compare the tokens of compiled and captured forwards with those of eager ones."""
    with tempfile.TemporaryDirectory() as folder:
        for name, dtype in (("float64", "float64"), ("float32", "float32")):
            with findings.check(f"tokens of eager, {name}") as values:
                random_module("Llama").save_pretrained(folder)
                eager = load("torch", folder, findings, dtype)
                model = _compiled(folder, findings, dtype)
                for draft in (None, model, PromptLookup()):
                    other = eager if draft is model else draft
                    require(texts(model, draft).tokens == texts(eager, other).tokens)
                start = time.perf_counter()
                texts(model, model)
                values["seconds, warm"] = time.perf_counter() - start


@section("torch: time of a block", limit=150)
def block_time(findings: Findings) -> None:
    """Report t(K + 1) / t(1), the premise of the method, eager and compiled."""
    shape = {"vocab_size": 49_152, "hidden_size": 576, "intermediate_size": 1536, "num_hidden_layers": 30}
    shape |= {"num_attention_heads": 9, "num_key_value_heads": 3, "max_position_embeddings": 2048}
    if not findings.is_accelerator:
        shape |= {"vocab_size": 4096, "num_hidden_layers": 4}
    dtype, context = ("bfloat16", 512) if findings.is_accelerator else ("float32", 128)
    with tempfile.TemporaryDirectory() as folder:
        for kind in ("eager", "compiled"):
            with findings.check(f"{kind}, {dtype}, {context} tokens of context") as values:
                if not (Path(folder) / "config.json").exists():
                    random_module("Llama", **shape).float().save_pretrained(folder)
                model = (
                    _compiled(folder, findings, dtype) if kind == "compiled" else load("torch", folder, findings, dtype)
                )
                cache = model.init_cache(1, context + 16)
                _, cache = model.score(cache, np.ones((1, context), np.int64), num_logits=0)

                def block(width: int, model: Any = model, cache: Any = cache) -> None:
                    model.score(cache, np.ones((1, width), np.int64))

                times = {width: timed(functools.partial(block, width), findings, 15) for width in (1, 2, 3, 5, 9)}
                values["ms"] = times
                values["ratio to one token"] = {width: round(ms / times[1], 3) for width, ms in times.items()}
