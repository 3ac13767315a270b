"""Chat templates in the shapes that real models use, shortened where nothing depends on it."""

from collections.abc import Callable

from transformers import PreTrainedTokenizerFast

MakeTokenizer = Callable[..., PreTrainedTokenizerFast]

SPECIAL_TOKENS = [
    *("<s>", "</s>", "<|im_start|>", "<|im_end|>", "<|endoftext|>"),
    *("<|begin_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"),
    *("[INST]", "[/INST]", "<start_of_turn>", "<end_of_turn>"),
]

CHATML = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n"
    "{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
CHATML_DEFAULT_SYSTEM = (  # Qwen2.5, SmolLM2
    "{% for message in messages %}{% if loop.first and messages[0]['role'] != 'system' %}"
    "<|im_start|>system\nYou are a helpful assistant.<|im_end|>\n{% endif %}"
    "<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
LLAMA3 = (
    "{% for message in messages %}{% set content = '<|start_header_id|>' + message['role'] +"
    " '<|end_header_id|>\n\n' + message['content'] | trim + '<|eot_id|>' %}"
    "{% if loop.index0 == 0 %}{% set content = '<|begin_of_text|>' + content %}{% endif %}"
    "{{ content }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|start_header_id|>assistant<|end_header_id|>\n\n' }}"
    "{% endif %}"
)
MISTRAL = (  # no generation prompt of its own; users and assistants must alternate
    "{{ bos_token }}{% for message in messages %}"
    "{% if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('Conversation roles must alternate user/assistant') }}{% endif %}"
    "{% if message['role'] == 'user' %}[INST] {{ message['content'] }} [/INST]"
    "{% else %} {{ message['content'] }}{{ eos_token }}{% endif %}{% endfor %}"
)
MISTRAL_SYSTEM_LAST = (  # the system prompt moves to the last user turn, as in v3 of the template
    "{% set system = messages[0]['content'] if messages[0]['role'] == 'system' else '' %}"
    "{% set turns = messages[1:] if system else messages %}"
    "{{ bos_token }}{% for message in turns %}{% if message['role'] == 'user' %}"
    "[INST] {% if system and (loop.last or (loop.index == loop.length - 1)) %}{{ system }}\n\n"
    "{% endif %}{{ message['content'] }} [/INST]"
    "{% else %} {{ message['content'] }}{{ eos_token }}{% endif %}{% endfor %}"
)
GEMMA = (
    "{{ bos_token }}{% if messages[0]['role'] == 'system' %}"
    "{{ raise_exception('System role not supported') }}{% endif %}{% for message in messages %}"
    "{% set role = 'model' if message['role'] == 'assistant' else message['role'] %}"
    "<start_of_turn>{{ role }}\n{{ message['content'] | trim }}<end_of_turn>\n{% endfor %}"
    "{% if add_generation_prompt %}<start_of_turn>model\n{% endif %}"
)
QWEN3 = (  # thinking survives only after the last user turn; the last turn always shows a block
    "{% set ns = namespace(last=0) %}{% for message in messages %}"
    "{% if message.role == 'user' %}{% set ns.last = loop.index0 %}{% endif %}{% endfor %}"
    "{% for message in messages %}{% if message.role != 'assistant' %}"
    "<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n"
    "{% else %}{% set content = message.content %}{% set thought = '' %}"
    "{% if '</think>' in content %}"
    "{% set thought = content.split('</think>')[0].rstrip('\n').split('<think>')[-1]"
    ".lstrip('\n') %}"
    "{% set content = content.split('</think>')[-1].lstrip('\n') %}{% endif %}"
    "<|im_start|>assistant\n{% if loop.index0 > ns.last and (loop.last or thought) %}"
    "<think>\n{{ thought.strip('\n') }}\n</think>\n\n{{ content.lstrip('\n') }}"
    "{% else %}{{ content }}{% endif %}<|im_end|>\n{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n"
    "{% if enable_thinking is defined and enable_thinking is false %}<think>\n\n</think>\n\n"
    "{% endif %}{% endif %}"
)
DEEPSEEK = (  # the generation prompt opens a thought that history does not show
    "{{ bos_token }}{% for message in messages %}{% if message['role'] == 'user' %}"
    "<|im_start|>{{ message['content'] }}{% else %}<|im_end|>"
    "{{ message['content'].split('</think>')[-1] }}{{ eos_token }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|im_end|><think>\n{% endif %}"
)
NO_GENERATION_PROMPT = (  # ignores add_generation_prompt, yet writes a header
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n"
    "{{ message['content'] }}<|im_end|>\n{% endfor %}"
)
TAGGED = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n"
    "{% if message['role'] == 'assistant' %}{% generation %}{{ message['content'] }}"
    "{% endgeneration %}{% else %}{{ message['content'] }}{% endif %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
PHI = (  # an end of text after the last turn only
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n"
    "{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% else %}{{ eos_token }}{% endif %}"
)
VICUNA = (  # plain words as headers, a space before the answer
    "{% for message in messages %}{% if message['role'] == 'user' %}"
    "USER: {{ message['content'] }} {% else %}ASSISTANT: {{ message['content'] }}{{ eos_token }}"
    "{% endif %}{% endfor %}{% if add_generation_prompt %}ASSISTANT:{% endif %}"
)
