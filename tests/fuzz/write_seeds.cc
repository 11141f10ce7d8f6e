// Writes the seeds of a target into the directory that it is called with.
#include <filesystem>
#include <fstream>
#include <string>

#include "target.h"

extern "C" int LLVMFuzzerInitialize(int* argc, char*** argv) {
  for (int i = 1; i < *argc; ++i) {
    const std::filesystem::path directory = (*argv)[i];
    if (!std::filesystem::is_directory(directory)) continue;
    int number = 0;
    for (const hvd::fuzz::Input& seed : hvd::fuzz::seeds()) {
      std::ofstream file(directory / ("seed-" + std::to_string(number++)), std::ios::binary);
      file.write(reinterpret_cast<const char*>(seed.data()), static_cast<std::streamsize>(seed.size()));
    }
    break;  // the first one is where libFuzzer adds what it finds
  }
  return 0;
}
