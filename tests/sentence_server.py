"""FastAPI in front of sentence-transformers, with faults that are switched on while it runs.

python sentence_server.py FOLDER PORT. It takes texts, in the dialect of OpenAI's embeddings; PUT
/faults with a JSON object of names switches faults on, an empty one switches them off. Needs
fastapi, uvicorn and sentence-transformers, which this project does not.
"""

import sys
from typing import Annotated

import torch
import uvicorn
from fastapi import Body, FastAPI
from sentence_transformers import SentenceTransformer

folder, port = sys.argv[1:]
model = SentenceTransformer(folder, device="cpu")
encoder = model[0].auto_model
app = FastAPI()
faults: dict[str, bool] = {}


@app.put("/faults")
def switch(wanted: dict[str, bool]):
    faults.clear()
    faults.update(wanted)
    gelu = torch.nn.GELU(approximate="tanh" if faults.get("tanh") else "none")
    for layer in encoder.encoder.layer:
        layer.intermediate.intermediate_act_fn = gelu
    return faults


@app.post("/v1/embeddings")
def embed(texts: Annotated[list[str], Body(alias="input", embed=True)]):
    inputs = model.tokenize(texts)
    if faults.get("ignore the mask"):
        inputs["attention_mask"] = torch.ones_like(inputs["attention_mask"])
    with torch.no_grad():
        vectors = model.forward(inputs)["sentence_embedding"]
    if faults.get("first token"):
        with torch.no_grad():
            states = encoder(inputs["input_ids"], inputs["attention_mask"]).last_hidden_state
        vectors = torch.nn.functional.normalize(states[:, 0], dim=-1)
    return {"data": [{"index": k, "embedding": v} for k, v in enumerate(vectors.tolist())]}


if __name__ == "__main__":
    uvicorn.run(app, port=int(port), log_level="warning")
