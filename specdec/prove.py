"""Is decoding with these drafters lossless?  python -m specdec.prove --draft DRAFT --prompt-file QUESTIONS

Three tests: greedy text against plain greedy text on real prompts, every verifier against exact laws of small tables,
and sampled text of the real pair against the target's own distributions. Exits with 0 if no bug was found, else with 1.
"""

from specdec.lab.prove import main

if __name__ == "__main__":
    main()
