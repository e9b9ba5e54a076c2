"""The processors of models that read images or sound as well."""
