/* The kernel's counters of a host's network interfaces. */
#ifndef BENCH_LINK_H
#define BENCH_LINK_H

/* Bytes that the interface of this host has sent since it was made, with all headers; not a number
 * when there is no such interface. */
double bench_link_sent(const char *interface);

#endif
