// Fails the compilation of a program for an older C++ standard, with the fix in the message.
#ifndef DDP_BASE_LANGUAGE_H_
#define DDP_BASE_LANGUAGE_H_

#if __cplusplus < 202002L
#error "ddp needs C++20: add `build --cxxopt=-std=c++20 --host_cxxopt=-std=c++20` to your .bazelrc"
#endif

#endif  // DDP_BASE_LANGUAGE_H_
