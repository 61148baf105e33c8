"""What every config section has in common."""

from pydantic import BaseModel, ConfigDict


class Section(BaseModel):
    """A frozen, strict config section: no unknown keys, no silent coercion ("10" is not 10), no NaN."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True, allow_inf_nan=False, populate_by_name=True)
