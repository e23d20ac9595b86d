"""Formats of strings that JSON Schema names, as regular expressions: days of the calendar from year 1 on, seconds up to 60."""

FOURTHS = "(?:0[48]|[2468][048]|[13579][26])"
LEAP = f"(?:[0-9]{{2}}{FOURTHS}|{FOURTHS}00)"  # every fourth year; of the hundreds every fourth too
LONG, SHORT = "(?:0[13578]|1[02])-(?:0[1-9]|[12][0-9]|3[01])", "(?:0[469]|11)-(?:0[1-9]|[12][0-9]|30)"
YEAR = "(?:000[1-9]|00[1-9][0-9]|0[1-9][0-9]{2}|[1-9][0-9]{3})"
DAY = f"(?:{YEAR}-(?:{LONG}|{SHORT}|02-(?:0[1-9]|1[0-9]|2[0-8]))|{LEAP}-02-29)"
TIME = r"(?:[01][0-9]|2[0-3]):[0-5][0-9]:(?:[0-5][0-9]|60)(?:\.[0-9]+)?(?:[Zz]|[+-](?:[01][0-9]|2[0-3]):[0-5][0-9])"
BYTE = "(?:25[0-5]|2[0-4][0-9]|1[0-9][0-9]|[1-9]?[0-9])"
IPV4 = rf"(?:{BYTE}\.){{3}}{BYTE}"
LABEL = "[0-9A-Za-z](?:[0-9A-Za-z-]{0,61}[0-9A-Za-z])?"
ATOM = "[0-9A-Za-z!#$%&'*+/=?^_`{|}~-]+"
DOMAIN = "[0-9A-Za-z](?:[0-9A-Za-z-]*[0-9A-Za-z])?"
POINTER = "(?:/(?:[^/~]|~[01])*)*"
HEX = "[0-9A-Fa-f]"
GROUP = f"{HEX}{{1,4}}"


def _ipv6() -> str:
    """Eight groups, of which the last two may be an IPv4 address; `::` once for one group of zeros or more."""
    ends = [f"{GROUP}:{GROUP}", IPV4]
    parts = [f"(?:{GROUP}:){{6}}(?:{'|'.join(ends)})"]
    for before in range(8):  # groups before the `::`; after it at most `most`
        left, most = ":".join([GROUP] * before), 7 - before
        right = [f"(?:{GROUP}(?::{GROUP}){{0,{most - 1}}})?"] if most else [""]
        if most >= 2:
            right.append(f"(?:{GROUP}:){{0,{most - 2}}}{IPV4}")
        parts.append(f"{left}::(?:{'|'.join(right)})")
    return f"(?:{'|'.join(parts)})"


FORMATS = {
    "date": f"^{DAY}$",
    "time": f"^{TIME}$",
    "date-time": f"^{DAY}[Tt]{TIME}$",
    "uuid": f"^{HEX}{{8}}(?:-{HEX}{{4}}){{3}}-{HEX}{{12}}$",
    **{f"uuid{n}": f"^{HEX}{{8}}-{HEX}{{4}}-{n}{HEX}{{3}}-[89ABab]{HEX}{{3}}-{HEX}{{12}}$" for n in range(1, 9)},
    "ipv4": f"^{IPV4}$",
    "ipv6": f"^{_ipv6()}$",
    "hostname": rf"^{LABEL}(?:\.{LABEL})*$",
    "email": rf"^{ATOM}(?:\.{ATOM})*@(?:{DOMAIN}(?:\.{DOMAIN})*|\[{IPV4}\])$",
    "idn-email": r"^[^\x00-\x20@]+@[^\x00-\x20@]+$",
    "json-pointer": f"^{POINTER}$",
    "relative-json-pointer": f"^(?:0|[1-9][0-9]*)(?:#|{POINTER})$",
}
ENGINE = ("uri", "duration")  # formats that llguidance knows besides
FREE = ("password", "binary")  # formats that every text has
JUDGED = ("regex",)  # formats that only the judge knows
