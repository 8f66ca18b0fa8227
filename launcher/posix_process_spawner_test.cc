int unused_placeholder;
