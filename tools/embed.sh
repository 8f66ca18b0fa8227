#!/usr/bin/env bash
# Writes a header that holds text files as string constants.
#
# Usage: embed.sh NAMESPACE HEADER FILE...
set -eu
namespace=$1
header=$2
shift 2
guard=DDP_EMBEDDED_$(tr 'a-z./-' 'A-Z___' <<<"$namespace")_H_
{
  printf '#ifndef %s\n#define %s\n\nnamespace ddp::embedded::%s {\n' "$guard" "$guard" "$namespace"
  for file in "$@"; do
    stem=$(basename "$file")
    stem=${stem%.*}
    name=$(sed -E 's/(^|_)([a-z0-9])/\U\2/g' <<<"$stem")
    printf '\ninline constexpr char k%s[] = R"__embed__(' "$name"
    cat "$file"
    printf ')__embed__";\n'
  done
  printf '\n}  // namespace ddp::embedded::%s\n\n#endif  // %s\n' "$namespace" "$guard"
} >"$header"
