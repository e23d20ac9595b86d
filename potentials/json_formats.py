"""Formats of strings that JSON Schema names, as regular expressions: days that a month may have, seconds up to 60."""

LONG, SHORT = "(?:0[13578]|1[02])-(?:0[1-9]|[12][0-9]|3[01])", "(?:0[469]|11)-(?:0[1-9]|[12][0-9]|30)"
DAY = f"(?:[0-9]{{4}}-(?:{LONG}|{SHORT}|02-(?:0[1-9]|[12][0-9])))"
TIME = r"(?:[01][0-9]|2[0-3]):[0-5][0-9]:(?:[0-5][0-9]|60)(?:\.[0-9]+)?(?:[Zz]|[+-](?:[01][0-9]|2[0-3]):[0-5][0-9])"
BYTE = "(?:25[0-5]|2[0-4][0-9]|1[0-9][0-9]|[1-9]?[0-9])"
LABEL = "[0-9A-Za-z](?:[0-9A-Za-z-]{0,61}[0-9A-Za-z])?"
ATOM = "[0-9A-Za-z!#$%&'*+/=?^_`{|}~-]+"
DOMAIN = "[0-9A-Za-z](?:[0-9A-Za-z-]*[0-9A-Za-z])?"

FORMATS = {
    "date": f"^{DAY}$",
    "time": f"^{TIME}$",
    "date-time": f"^{DAY}[Tt]{TIME}$",
    "uuid": "^[0-9A-Fa-f]{8}(?:-[0-9A-Fa-f]{4}){3}-[0-9A-Fa-f]{12}$",
    "ipv4": rf"^(?:{BYTE}\.){{3}}{BYTE}$",
    "hostname": rf"^{LABEL}(?:\.{LABEL})*$",
    "email": rf"^{ATOM}(?:\.{ATOM})*@(?:{DOMAIN}(?:\.{DOMAIN})*|\[(?:{BYTE}\.){{3}}{BYTE}\])$",
}
