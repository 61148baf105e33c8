"""The server of one model: the body of an error is that of OpenAI's API, whose client prints its message."""

import pytest

from pretrain.artifact.served import serve_one

fastapi = pytest.importorskip("fastapi")
openai = pytest.importorskip("openai")
testclient = pytest.importorskip("fastapi.testclient")


@pytest.fixture
def client():
    app = fastapi.FastAPI()

    @app.post("/v1/chat/completions")
    async def complete(body: dict):
        if "messages" not in body or not body["messages"]:
            raise fastapi.HTTPException(status_code=400, detail="no messages.")
        return {"id": "1", "object": "chat.completion", "created": 0, "model": body["model"], "choices": []}

    serve_one(app, "chat")
    return openai.OpenAI(
        base_url="http://testserver/v1", api_key="none", max_retries=0, http_client=testclient.TestClient(app)
    )


def test_another_model_is_not_found_by_the_name_of_the_one_that_is_served(client):
    said = [{"role": "user", "content": "Who?"}]
    for stream in (False, True):
        with pytest.raises(openai.NotFoundError) as caught:
            client.chat.completions.create(model="gpt-4", messages=said, stream=stream)
        assert str(caught.value) == 'Error code: 404 - The model "gpt-4" is not served here; the model is "chat".'
        assert caught.value.code == "model_not_found"
    assert client.chat.completions.create(model="chat", messages=said).model == "chat"
    with pytest.raises(openai.BadRequestError, match=r"^Error code: 400 - no messages\.$"):
        client.chat.completions.create(model="chat", messages=[])


def test_the_list_of_models_is_the_one_that_is_served(client):
    assert [model.id for model in client.models.list()] == ["chat"]
