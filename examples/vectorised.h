/*
 * Loops for vectors: a function marked VECTORISED is compiled for several instruction sets, and the
 * program takes the best that the machine has when it starts: one portable program, full speed.
 * Sanitizers are not ready that early, and clang 14 makes such functions invisible to other files.
 * The results are the same bits.
 */
#ifndef EXAMPLES_VECTORISED_H
#define EXAMPLES_VECTORISED_H

#if defined(__x86_64__) && defined(__GLIBC__) && defined(__GNUC__) && !defined(__clang__) &&       \
    !defined(__SANITIZE_ADDRESS__) && !defined(__SANITIZE_THREAD__)
#define VECTORISED __attribute__((target_clones("avx512f", "avx2", "default")))
#else
#define VECTORISED
#endif

#endif
