"""The same program on every backend: load a pair, generate, stream, and read the stats.

    python docs/examples/use_a_backend.py --backend torch
    python docs/examples/use_a_backend.py --backend numpy --target my-llama --draft lookup

Without --target and --draft it takes the pair in the package, whose token ids are bytes. With checkpoints of your own
encode the prompt with their tokenizer.
"""

import argparse

import specsampling


def main(arguments: list[str] | None = None) -> list[int]:
    """Generate with one backend and return the new token ids."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--backend", default="numpy", help="a name that `specsampling backends` lists")
    parser.add_argument("--target", default=specsampling.bundled("target"))
    parser.add_argument("--draft", default=specsampling.bundled("draft"), help='a checkpoint, or "lookup"')
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--device")
    parser.add_argument("--max-new-tokens", type=int, default=48)
    args = parser.parse_args(arguments)

    target = specsampling.load_model(args.backend, args.target, dtype=args.dtype, device=args.device)
    if args.draft == "lookup":
        drafter: object = specsampling.PromptLookup()
    else:
        drafter = specsampling.load_model(args.backend, args.draft, dtype=args.dtype, device=args.device)
    prompt = list(b"ROMEO:\nO, she doth teach the")

    # `stream` yields what each round committed, and returns what `generate` would have.
    events = specsampling.stream(target, drafter, prompt, max_new_tokens=args.max_new_tokens, seed=0)
    while True:
        try:
            event = next(events)
        except StopIteration as end:
            result = end.value
            break
        print(f"{len(event.tokens)} tokens: {bytes(event.tokens)!r}")

    stats = result.stats
    print(f"{args.backend}: {stats.emitted} tokens in {stats.target_calls} target calls", end="")
    print(f", {stats.acceptance_rate:.0%} accepted" if stats.acceptance_rate is not None else "")
    tokens: list[int] = result.tokens[0]
    return tokens


if __name__ == "__main__":
    main()
