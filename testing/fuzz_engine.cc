// Entry points that libFuzzer calls.
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <fstream>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "testing/fuzz_target.h"

// Writes the seeds to the folder that DDP_FUZZ_SEEDS names: libFuzzer takes its seeds from files.
extern "C" int LLVMFuzzerInitialize(int*, char***) {
  const char* const folder = std::getenv("DDP_FUZZ_SEEDS");
  if (folder == nullptr) return 0;
  const std::vector<std::string> seeds = ddp::testing::FuzzSeeds();
  for (size_t i = 0; i < seeds.size(); ++i) {
    const std::string path = absl::StrCat(folder, "/seed-", i);
    std::ofstream file(path, std::ios::binary);
    file << seeds[i];
    if (!file.flush()) {
      std::fprintf(stderr, "DDP_FUZZ_SEEDS: cannot write %s\n", path.c_str());
      std::exit(1);
    }
  }
  return 0;
}

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  ddp::testing::FuzzOne({reinterpret_cast<const char*>(data), size});
  return 0;
}
