"""A batch of rows that differ in length, settings and limits, and what its seed fixes.

python docs/examples/batch_with_seeds.py
"""

import specsampling
from specsampling import Sampling


def main() -> None:
    """Generate a batch, then the same rows in other company."""
    target = specsampling.load_model("numpy", specsampling.bundled("target"))
    draft = specsampling.load_model("numpy", specsampling.bundled("draft"))
    prompts = [list(b"ROMEO:"), list(b"First Citizen:\nWe are "), list(b"The")]
    settings = Sampling(temperature=[0.0, 0.8, 1.0], top_p=[None, 0.95, None])  # the first row is greedy
    limits = [40, 24, 32]

    result = specsampling.generate(target, draft, prompts, max_new_tokens=limits, sampling=settings, seed=7)
    for prompt, tokens, reason in zip(prompts, result.tokens, result.finish_reasons, strict=True):
        print(f"{bytes(prompt + tokens).decode(errors='replace')!r} ({reason})")

    # A row's tokens depend on the seed, its id, its prompt and the lookahead: not on the batch.
    for row, prompt in enumerate(prompts):
        alone = specsampling.generate(
            target, draft, prompt, max_new_tokens=limits[row], sampling=settings.rows([row]), seed=7, row_ids=[row]
        )
        assert alone.tokens[0] == result.tokens[row]

    # Samples of one prompt: the rows' ids differ, and so do their draws. More of them later: go on with other ids.
    prompt = list(b"ROMEO:")
    first = specsampling.generate(target, draft, [prompt] * 4, max_new_tokens=12, seed=7)
    more = specsampling.generate(target, draft, [prompt] * 4, max_new_tokens=12, seed=7, row_ids=range(4, 8))
    print(f"{len({tuple(tokens) for tokens in first.tokens + more.tokens})} different samples of 8")

    # seed=None draws one and says which, so that any run can be repeated.
    fresh = specsampling.generate(target, draft, prompt, max_new_tokens=12, seed=None)
    again = specsampling.generate(target, draft, prompt, max_new_tokens=12, seed=fresh.seed)
    assert again.tokens == fresh.tokens


if __name__ == "__main__":
    main()
