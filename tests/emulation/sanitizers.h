/*
 * Finds the sanitizers that this is compiled with, which gcc and clang announce differently.
 */
#ifndef EMULATION_SANITIZERS_H
#define EMULATION_SANITIZERS_H

#ifndef __has_feature
#define __has_feature(name) 0
#endif

#if defined(__SANITIZE_ADDRESS__) || __has_feature(address_sanitizer)
#define EMULATION_ASAN 1
#else
#define EMULATION_ASAN 0
#endif

#if defined(__SANITIZE_THREAD__) || __has_feature(thread_sanitizer)
#define EMULATION_TSAN 1
#else
#define EMULATION_TSAN 0
#endif

#endif
