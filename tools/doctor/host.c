/* What the doctor reads of the host that it runs on; Linux. */
#define _GNU_SOURCE /* sched_getaffinity, IFF_LOWER_UP */
#include <arpa/inet.h>
#include <ifaddrs.h>
#include <linux/if.h>
#include <netinet/in.h>
#include <sched.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

#include "tools/doctor/doctor.h"

_Static_assert(sizeof(cpu_set_t) == DOCTOR_CPU_WORDS * sizeof(uint64_t), "a bit for a bit");

double doctor_now(void) {
  struct timespec now;
  clock_gettime(CLOCK_MONOTONIC, &now);
  return (double)now.tv_sec + 1e-9 * (double)now.tv_nsec;
}

void doctor_read_cpus(uint64_t cpus[DOCTOR_CPU_WORDS]) {
  cpu_set_t set;
  memset(cpus, 0, sizeof set);
  if (sched_getaffinity(0, sizeof set, &set) == 0)
    memcpy(cpus, &set, sizeof set);
}

/* A number in a file of /sys/class/net/INTERFACE; `missing` where the kernel does not say. */
static long long read_number(const char *interface, const char *file, long long missing) {
  char path[128];
  snprintf(path, sizeof path, "/sys/class/net/%s/%s", interface, file);
  FILE *stream = fopen(path, "r");
  long long number = missing;
  if (stream) {
    if (fscanf(stream, "%lld", &number) != 1)
      number = missing;
    fclose(stream);
  }
  return number;
}

static bool has_device(const char *interface) {
  char path[128];
  snprintf(path, sizeof path, "/sys/class/net/%s/device", interface);
  return access(path, F_OK) == 0;
}

static void read_interface(const struct ifaddrs *entry, struct doctor_interface *interface) {
  const char *name = interface->name;
  snprintf(interface->name, sizeof interface->name, "%.15s", entry->ifa_name);
  interface->address = ntohl(((struct sockaddr_in *)(void *)entry->ifa_addr)->sin_addr.s_addr);
  interface->netmask = ntohl(((struct sockaddr_in *)(void *)entry->ifa_netmask)->sin_addr.s_addr);
  interface->up = (entry->ifa_flags & IFF_UP) && (entry->ifa_flags & IFF_RUNNING);
  interface->mtu = (int)read_number(name, "mtu", 0);
  interface->speed = (int)read_number(name, "speed", -1);
  interface->physical = has_device(name);
  interface->sent = (uint64_t)read_number(name, "statistics/tx_bytes", 0);
  interface->received = (uint64_t)read_number(name, "statistics/rx_bytes", 0);
  interface->packets = (uint64_t)read_number(name, "statistics/tx_packets", 0);
}

void doctor_read_host(struct doctor_host *host) {
  struct ifaddrs *all;
  memset(host, 0, sizeof *host);
  gethostname(host->name, sizeof host->name - 1);
  host->cpus_online = (int)sysconf(_SC_NPROCESSORS_ONLN);
  if (getifaddrs(&all) != 0)
    return;
  for (struct ifaddrs *entry = all; entry; entry = entry->ifa_next)
    if (entry->ifa_addr && entry->ifa_netmask && entry->ifa_addr->sa_family == AF_INET &&
        !(entry->ifa_flags & IFF_LOOPBACK) && host->interface_count < DOCTOR_INTERFACES)
      read_interface(entry, &host->interfaces[host->interface_count++]);
  freeifaddrs(all);
}

void doctor_subtract(const struct doctor_host *before, struct doctor_host *after) {
  for (int i = 0; i < after->interface_count; i++) {
    struct doctor_interface *now = &after->interfaces[i];
    const struct doctor_interface *then = NULL;
    for (int k = 0; k < before->interface_count && !then; k++)
      if (strcmp(before->interfaces[k].name, now->name) == 0)
        then = &before->interfaces[k];
    now->sent -= then ? then->sent : now->sent;
    now->received -= then ? then->received : now->received;
    now->packets -= then ? then->packets : now->packets;
  }
}
