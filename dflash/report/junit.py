"""A diagnosis as JUnit XML: a test case a failure mode, for the page that CI shows."""

from xml.etree.ElementTree import Element, SubElement, indent, tostring

from dflash.diagnose.findings import Diagnosis, Finding
from dflash.report.diagnosis import finding_lines


def junit_xml(diagnosis: Diagnosis) -> str:
    """Reproduced is a failure, inconclusive an error, not applicable a skip."""
    findings = diagnosis.findings
    counts = {
        "tests": len(findings),
        "failures": sum(_is_failure(finding) for finding in findings),
        "errors": sum(finding.verdict == "inconclusive" for finding in findings),
        "skipped": sum(finding.verdict == "not applicable" for finding in findings),
    }
    numbers = {name: str(count) for name, count in counts.items()}
    root = Element("testsuites")
    numbers |= {"name": "dflash diagnose", "time": f"{diagnosis.wall_s:.3f}"}
    suite = SubElement(root, "testsuite", numbers)
    properties = SubElement(suite, "properties")
    for name, value in (("torch", diagnosis.torch), ("level", diagnosis.level)):
        SubElement(properties, "property", name=name, value=value)
    for finding in findings:
        _case(suite, finding)
    indent(root)
    return tostring(root, encoding="unicode", xml_declaration=True) + "\n"


def _case(suite: Element, finding: Finding) -> None:
    case = SubElement(
        suite,
        "testcase",
        classname="dflash.failures",
        name=finding.slug,
        time=f"{finding.wall_s:.3f}",
    )
    message = f"{finding.verdict}: {finding.why}"
    text = _printable("\n".join(finding_lines(finding)))
    if finding.verdict == "not applicable":
        SubElement(case, "skipped", message=message)
    elif finding.verdict == "inconclusive":
        SubElement(case, "error", message=message, type="inconclusive").text = text
    elif _is_failure(finding):
        if finding.verdict != "reproduced":
            message = f"the remedy failed: {finding.remedy_why}"
        SubElement(case, "failure", message=message, type=finding.verdict).text = text
    else:
        SubElement(case, "system-out").text = text


def _is_failure(finding: Finding) -> bool:
    return finding.severity == "error" and finding.verdict != "inconclusive"


def _printable(text: str) -> str:
    """Without the control characters that XML cannot hold."""
    return "".join(char for char in text if char.isprintable() or char in "\n\t")
